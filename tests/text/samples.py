"""Real text of many kinds, for tests that draw from it."""

from hypothesis import strategies as st

SAMPLES = (
    "The capital of France is Paris.\n\nIt lies on the Seine.",
    "def f(x):\n    return {k: v for k, v in x.items() if v is not None}  # comment\n\t\tif a != b: pass",
    "敏捷的棕色狐狸跳过了懒狗。東京は日本の首都です。한국어 문장도 있습니다.",
    "Emoji: 😀👩‍👩‍👧‍👦🏳️‍🌈🇩🇪 and 👍🏽!",
    "Größe, naïve, Ελληνικά, русский, עברית, العربية, हिन्दी, ไทย",
    "  leading, trailing   and \r\n odd \u00a0\u2003 spaces  ",
    "a" * 40 + "ÿ" * 5 + "\u0301\u0301",
    "<|im_start|>user\nspelled-out <|im_end|> tokens",
    '{"json": [1, 2.5e-3, null, "\\u00e9"], "x": "\\n"}',
    "\U0001f9ff\U00012000\ufffd\x00\x7f",
)

texts = st.lists(st.one_of(st.sampled_from(SAMPLES), st.text(max_size=12)), min_size=1, max_size=4).map("".join)
"""Samples and arbitrary characters, mixed."""
