"""The runner: a Hugging Face model that computes steps over paged KV. torch lives here and nowhere else.

`loader.load_runner` is the way in; `runner.ModelRunner` is what the engine plugs in.
"""
