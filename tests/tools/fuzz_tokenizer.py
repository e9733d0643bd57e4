"""Comparison of fastokens' ids with those of `tokenizers`, on random strings.

`python -m tests.tools.fuzz_tokenizer FOLDER [NUMBER [SEED]]`: prints each kind of string at which
the ids differ, and exits with 1 then. A string follows from the seed and its number.
"""

import os
import sys
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from time import process_time

import fastokens
from tokenizers import Tokenizer

BATCH = 1000
SPACES = " \t\n\r\x0b\x0c\x85\xa0\u2003\u2028\u2029\u3000\u200b\ufeff"
CONTRACTIONS = ["'s", "'S", "'t", "'RE", "'ve", "'m", "'lL", "'D", "'ſ", "’s", "''s", "'K"]
COMBINED = ["e\u0301", "é", "A\u030a", "Å", "\u212b", "\u1e9b\u0323", "\u0958", "\u2126", "\ufb1d"]
COMBINED += ["\u1100\u1161\u11a8", "각", "\u0344", "q\u0307\u0323", "\u0f73"]
COMBINED += ["\U0001d15e", "ﬁ", "²"]
EMOJI = ["🙂", "👩\u200d🚀", "🏳️\u200d🌈", "🇩🇪", "👍🏽", "☺\ufe0f", "\U0001f9d1\u200d\U0001f91d"]
WORDS = "the of def return import Straße naïve Ελλάδα МОСКВА 東京 数字 العربية עברית हिन्दी ไทย x1y2"
SCRIPTS = [(0, 0x80), (0x80, 0x250), (0x250, 0x590), (0x590, 0xE00), (0xE00, 0x2000)]
SCRIPTS += [(0x2000, 0x3000), (0x3000, 0xD800), (0xE000, 0x10000), (0x10000, 0x20000)]
SCRIPTS += [(0x20000, 0x110000), (0x300, 0x370), (0x1100, 0x1200), (0x660, 0x66A)]
SCRIPTS += [(0x1D7CE, 0x1D800)]


def kinds(tokens: list[str], special: list[str], texts: list[str]) -> list[Callable[[Random], str]]:
    """Return the functions that make a string, by a random number generator."""

    def one_script(rng: Random) -> str:
        begin, end = rng.choice(SCRIPTS)
        return "".join(chr(rng.randrange(begin, end)) for _ in range(rng.randint(1, 40)))

    def any_character(rng: Random) -> str:
        return "".join(one_script(rng)[:2] for _ in range(rng.randint(1, 20)))

    def runs(rng: Random) -> str:
        pool = SPACES + "'\"!.-_=0159aZé東\u0301🙂\0"
        return "".join(rng.choice(pool) * rng.randint(1, 9) for _ in range(rng.randint(1, 12)))

    def words(rng: Random) -> str:
        digits = ["12345", "7", "٣", "½"]
        pools = [WORDS.split(), CONTRACTIONS, COMBINED, EMOJI, list(SPACES), digits]
        return "".join(rng.choice(rng.choice(pools)) for _ in range(rng.randint(1, 25)))

    def of_tokens(rng: Random) -> str:
        return "".join(rng.choice(tokens) for _ in range(rng.randint(1, 20)))

    def of_special(rng: Random) -> str:
        """Make special tokens: whole, cut, doubled, and with something between their characters."""
        parts = []
        for _ in range(rng.randint(1, 6)):
            one = rng.choice(special)
            at = rng.randrange(len(one))
            marked = one[:at] + "\u0301" + one[at:]
            forms = (one, one[:at], one[at:], one + one, marked, one.upper())
            parts += [rng.choice(forms), rng.choice(["", " ", "\n", "a", "é", words(rng)])]
        return "".join(parts)

    def of_text(rng: Random) -> str:
        text = rng.choice(texts)
        begin = rng.randrange(len(text))
        piece = text[begin : begin + rng.randint(1, 300)]
        at = rng.randrange(len(piece))
        form = rng.choice(["NFC", "NFD", "NFKC", "NFKD"])
        return unicodedata.normalize(form, piece[:at] + one_script(rng)[:3] + piece[at + 1 :])

    return [one_script, any_character, runs, words, of_tokens, of_special, of_text]


def strings(folder: Path, number: int, seed: int) -> Iterator[str]:
    """Yield `number` random strings for the tokenizer in `folder`."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    ids = Random(seed).sample(range(tokenizer.get_vocab_size()), 250)
    tokens = [tokenizer.decode([one], skip_special_tokens=False) for one in ids]
    root = Path(__file__).parents[2]
    texts = [path.read_text() for path in sorted(root.glob("**/*.md")) if ".venv" not in path.parts]
    makers = kinds(tokens, added, [text for text in texts if text])
    for index in range(number):
        rng = Random(f"{seed}/{index}")
        yield makers[index % len(makers)](rng)


def differing(folder: Path, number: int, seed: int = 0) -> list[str]:
    """Return the strings of which the ids differ."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    path = str(folder / "tokenizer.json")
    theirs, fast = Tokenizer.from_file(path), fastokens.Tokenizer.from_file(path)
    found: list[str] = []
    seconds = [0.0, 0.0]
    batch: list[str] = []

    def compare() -> None:
        times = [process_time()]
        expected = theirs.encode_batch_fast(batch, add_special_tokens=True)
        times.append(process_time())
        got = [fast.encode(one, add_special_tokens=True) for one in batch]
        times.append(process_time())
        seconds[0] += times[1] - times[0]
        seconds[1] += times[2] - times[1]
        for text, one, two in zip(batch, expected, got, strict=True):
            if one.ids != list(two.ids):
                found.append(text)

    for text in strings(folder, number, seed):
        batch.append(text)
        if len(batch) == BATCH:
            compare()
            batch.clear()
    if batch:
        compare()
    print(f"tokenizers {seconds[0]:.1f} s, fastokens {seconds[1]:.1f} s of CPU time")
    return found


def main() -> None:
    """Compare, and print what differs."""
    folder, *numbers = sys.argv[1:]
    found = differing(Path(folder), *map(int, numbers or ["1000000"]))
    for text in found[:20]:
        print(ascii(text))
    print(f"{len(found)} strings differ")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
