"""Tokenizers to test with: the embedded model's real one (byte-level), and small ones of the other kinds."""

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from foreword.text import tokenizer as text_tokenizer
from tests.text.embedded import embedded_directory

__all__ = ["embedded_directory"]


@pytest.fixture(scope="session")
def tokenizer(embedded_directory: Path) -> text_tokenizer.Tokenizer:
    return text_tokenizer.Tokenizer(embedded_directory)


@pytest.fixture(scope="session")
def llama_style(tmp_path_factory: pytest.TempPathFactory) -> text_tokenizer.Tokenizer:
    """A sentencepiece tokenizer with byte tokens, a marker for spaces, and a first space that is dropped."""
    special = ["<unk>", "<s>", "</s>"]
    pieces = ["▁", "▁▁", "▁the", "▁a", "a", "b", "the", "▁hello", "▁world", ".", ",", "你", "好", "x", "▁x", "▁你"]
    names = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    model = models.BPE(
        vocab={name: i for i, name in enumerate(names)}, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True
    )
    made = Tokenizer(model)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    return _saved(made, tmp_path_factory.mktemp("llama-style"))


@pytest.fixture(scope="session")
def wordpiece(tmp_path_factory: pytest.TempPathFactory) -> text_tokenizer.Tokenizer:
    """A WordPiece tokenizer, which puts spaces between words that have none of their own."""
    names = ["[UNK]", "[SEP]", "a", "the", "##ing", "sing", "##s", ".", ","]
    made = Tokenizer(models.WordPiece(vocab={name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece(cleanup=False)
    made.add_special_tokens([AddedToken("[SEP]", special=True)])
    return _saved(made, tmp_path_factory.mktemp("wordpiece"))


def _saved(made: Tokenizer, folder: Path) -> text_tokenizer.Tokenizer:
    PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(folder)
    return text_tokenizer.Tokenizer(folder)
