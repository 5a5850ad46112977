"""OpenAI's form: `requests` and `responses` are the wire, each other file is one route."""
