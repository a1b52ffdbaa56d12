"""Asks llama.cpp for the tokens of our sample texts, and writes its answers to tokenizer_goldens.json.gz.

Runs under an interpreter that has llama-cpp-python, with the project's sources on the path:

    PYTHONPATH=src python tests/oracle/make_tokenizer_goldens.py MODEL.gguf [--data FOLDER]

The texts are tokenised with the model's own pre-tokenizer, with special tokens read and not read; then with every other
pre-tokenizer on the same vocabulary, as a file that names it; then with a small SentencePiece-style vocabulary made of
the texts themselves. Public texts are stored as digests of their tokens, one a paragraph.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import struct
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import llama_cpp

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "unit"))

from gguf_writer import write_gguf  # noqa: E402

from tokenmill.formats.gguf import GGUFFile  # noqa: E402

GOLDENS = HERE / "tokenizer_goldens.json.gz"
PUBLIC_TEXT = "text/xquad.jsonl.gz"

PRE_TOKENIZERS = (
    "gpt-2", "llama-bpe", "dbrx", "qwen2", "qwen35", "gpt-4o", "tekken", "seed-coder", "bailingmoe", "deepseek-v3",
    "deepseek-coder", "falcon", "bloom", "viking", "default",
)  # fmt: skip

TEXTS = (
    "",
    " ",
    "Hello, world!",
    "Hello  world   with    runs     of spaces",
    " leading and trailing ",
    "I'm sure they'll say we've seen it; you'd think she's right, DON'T YOU? IT'S 'tis",
    "don't DON'T dON’T it’s",
    "naïve café, façade, Zürich, Ångström, œuvre, straße, Þórr, Łódź, İstanbul, ǅungla",
    "Größenwahn ÜBER ÉCOLE éCOLE camelCaseWord HTMLParser XMLHttpRequest iPhone McDonald",
    "Привет, мир! Как дела? Всё хорошо.",
    "Γειά σου Κόσμε, πῶς ἔχεις;",
    "שלום עולם, מה שלומך?",
    "مرحبا بالعالم، كيف حالك؟ ١٢٣٤",
    "नमस्ते दुनिया, आप कैसे हैं? १२३",
    "สวัสดีชาวโลก ภาษาไทยไม่มีช่องว่าง",
    "你好，世界！今天天气怎么样？我有３個蘋果。",
    "こんにちは世界。カタカナとひらがな、漢字。ｶﾀｶﾅ",
    "안녕하세요 세계! 한국어 문장입니다.",
    "Xin chào thế giới, tiếng Việt có dấu",
    "မင်္ဂလာပါ ကမ္ဘာလောက",
    "ሰላም ልዑል",
    "ᏣᎳᎩ ꦧꦱꦗꦮ 𐌰𐌱𐌲 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𠮷野家",
    "😀 😃😄 👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷🇯🇵 ❤️ ☕ 1️⃣",
    "e\u0301 n\u0303 Å ﬁ ½ ² ③ Ⅷ ੧ 〇 ௧",
    "1 12 123 1234 12345 1234567890 3.14159 1,000,000 1e-9 0xDEADBEEF v2.0.1 12:30 2024-02-29",
    "x = 3*y**2 + 4/(z-1); if (a<=b && c!=d) { return ~x; } // comment #1",
    "def f(x):\n    if x > 0:\n\treturn x\n\n\n    return -x  # trailing  \n",
    "fn main() {\r\n    println!(\"{:?}\", vec![1, 2, 3]);\r\n}\r\n",
    "SELECT * FROM t WHERE a='b' AND c IN (1,2);--",
    "<html><body class=\"x\">&nbsp;&amp;</body></html>",
    "https://example.org/path?q=a%20b&x=1#frag user.name+tag@example.com C:\\Users\\x",
    "a\tb\t\tc\n\nd\r\ne\rf\x0bg\x0ch",
    "\n", "\n\n", "\n\n\nx", "x\n\n\n", " \n \n x", "\t\t\tx", "   ", "      x", "x      ",
    "null \x00 bell \x07 escape \x1b[31m delete \x7f c1 \x85 \x9f",
    "nbsp\u00a0here en\u2002em\u2003thin\u2009zero\u200bwidth\u200cjoin\u200d ideo\u3000graphic",
    "line\u2028sep para\u2029graph next\x85line",
    "bom\ufeff replacement\ufffd private\ue000 nonchar\uffff tag\U000e0041 highest\U0010ffff",
    "rtl \u202eabc\u202c lrm\u200e soft\u00adhyphen",
    "!!! ??? ... --- ___ ''' \"\"\" `` ~~ ^^ $$ %% && ** (( )) [[ ]] {{ }} || \\\\ // :: ;; ,, @@ ##",
    "“quoted” ‘single’ «guillemets» —dash– …ellipsis ¿qué? ¡sí! €100 £5 ¥7 ©®™ ±×÷ ≤≥≠ ∑∏∫ →⇒",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "supercalifragilisticexpialidocious antidisestablishmentarianism Donaudampfschifffahrtsgesellschaft",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "a<|im_end|>b <|endoftext|> c<|im_end|><|im_end|>",
    "almost <|im_end| > <|im_start <|im_end|x|> |im_end|> <<|im_end|>>",
    "<repo_name>x<file_sep>y<jupyter_code>z <empty_output>",
    "The quick brown fox jumps over the lazy dog. " * 5,
    "Mixed: English，中文mixed日本語text한국어and😀emoji123with٣٤numbers.",
    "snake_case kebab-case dot.case UPPER_CASE a1b2c3 x86_64 utf-8 C++ C# F# .NET",
    "Tab\there, newline\nthere, \\n escaped, 100% sure & <tag> \"q\" 'q' (p) [b] {c}",
    "ſ K Å ǆ ﬀ ẞ ß ı İ ŉ",
    "۰۱۲ ߀߁ ०१ ৪৫ 〡〢 ⅓ ⅔ ¼ ¹²³ ₁₂ ①② ㊀ 𝟙𝟚",
    "\u0301combining first a\u0300\u0301\u0302 q\u0323\u0307",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, help="folder of public texts")
    options = parser.parse_args()
    metadata = GGUFFile.open(options.model).metadata
    own = Vocabulary(options.model)
    goldens: dict[str, Any] = {
        "llama_cpp": llama_cpp.__version__,
        "texts": TEXTS,
        "parsed": [own.tokenize(text, special=True) for text in TEXTS],
        "plain": [own.tokenize(text, special=False) for text in TEXTS],
        "public": public_digests(own, options.data),
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        kept = {key: item for key, item in metadata.items() if key.startswith(("general.arch", "llama.", "tokenizer."))}
        goldens["schemes"] = {}
        for name in PRE_TOKENIZERS:
            vocabulary = Vocabulary(write_gguf(path, {**kept, "tokenizer.ggml.pre": name}))
            goldens["schemes"][name] = [vocabulary.tokenize(text, special=True) for text in TEXTS]
        pieces = sentencepiece_metadata()
        vocabulary = Vocabulary(write_gguf(path, {**kept_dimensions(kept), **pieces}))
        goldens["sentencepiece"] = {
            "metadata": pieces,
            "ids": [vocabulary.tokenize(text, special=True) for text in TEXTS],
        }
    with gzip.GzipFile(GOLDENS, "wb", mtime=0) as file:
        file.write(json.dumps(goldens, ensure_ascii=True).encode())
    print(f"{GOLDENS}: {GOLDENS.stat().st_size} bytes")


class Vocabulary:
    """llama.cpp's tokenizer of one file."""

    def __init__(self, path: Path) -> None:
        self._model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        return list(self._model.tokenize(text.encode(), add_bos=False, special=special))


def public_digests(vocabulary: Vocabulary, data: Path | None) -> list[str]:
    if data is None:
        return []
    with gzip.open(data / PUBLIC_TEXT, "rt", encoding="utf-8") as file:
        return [digest(vocabulary.tokenize(json.loads(line)["context"], special=False)) for line in file]


def digest(ids: list[int]) -> str:
    return hashlib.sha256(struct.pack(f"<{len(ids)}I", *ids)).hexdigest()[:16]


def kept_dimensions(metadata: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in metadata.items() if not key.startswith("tokenizer.")}


def sentencepiece_metadata() -> dict[str, Any]:
    """A vocabulary as a small SentencePiece BPE model has it: unknown, BOS, EOS, 256 bytes, pieces by falling score."""
    marked = [("▁" + text).replace(" ", "▁") for text in TEXTS]
    counts = Counter(text[i : i + n] for text in marked for n in range(2, 9) for i in range(len(text) - n + 1))
    common = [
        piece for piece, count in counts.most_common() if count > 2 and not any(c < " " or c in "<>" for c in piece)
    ]
    chars = sorted({char for text in marked for char in text if "\x20" < char < "\u3000" and char not in "<>"})[:400]
    control = ["<unk>", "<s>", "</s>"]
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    words = sorted(common[:1500], key=len)
    tokens = [*control, *pieces, *words, *chars]
    scores = [0.0] * 259 + [float(-i) for i in range(len(words) + len(chars))]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(words) + len(chars))
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


if __name__ == "__main__":
    main()
