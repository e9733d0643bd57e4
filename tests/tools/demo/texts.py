"""Random text in many scripts: what `repeat` repeats, and what system messages are made of."""

import random

_COMMON_WORDS_TEXT = """
    a about after again all also an and any are as at back be because been before but by
    call came can come could day did do down each even find first for from get give go good
    great had has have he her here him his house how I if in into is it its just know large
    last left letter life light like line little long look made make man many may me more most
    mother much must my name never new no not now number of off old on one only or other our
    out over own part people penstock pipe place point power read right river said same saw say
    school see sentence server she should show small so some sound start still stop stream such
    take tell than that the their them then there these they thing think this those three time
    to token too tree turbine turn two under up us use valve very walk want was water way we
    well went were what when where which while who why will with word work world would write
    year you young your
"""
COMMON_WORDS = tuple(_COMMON_WORDS_TEXT.split())

_COMMON_CHINESE = (
    "的一是不了在人有我他这个们中来上大为和国地到以说时要就出会可也你对生能而子那得于着下自之年过"
    "发后作里用道行所然家种事成方多经么去法学如都同现当没动面起看定天分还进好小部其些主样理心她本"
    "前开但因只从想实日军者意无力它与长把机十民第公此已工使情明性知全三又关点正业外将两高间由问很"
)
_CHINESE_PUNCTUATION = "\uff0c\u3002\uff01\uff1f\u3001\uff1a\uff1b"
_VOWELS = "aeiouy"
_CONSONANTS = "bcdfghjklmnpqrstvwxz"
_PRINTABLE = "".join(chr(code) for code in range(0x21, 0x7F))
_ACCENTED = "àáâãäåæçèéêëìíîïñòóôõöøœùúûüýÿßğışłńśźżčřšžőű"
_ALPHABETS = (
    "".join(map(chr, range(0x430, 0x450))) * 4 + "ёіїєґ" + "".join(map(chr, range(0x410, 0x430))),
    "".join(map(chr, range(0x3B1, 0x3CA))) + "άέήίόύώ",
    "".join(map(chr, range(0x3041, 0x3097))),
    "".join(map(chr, range(0x30A1, 0x30FB))) + "ー",
    "".join(map(chr, range(0x627, 0x64B))),
    "".join(map(chr, range(0x5D0, 0x5EB))),
    "".join(map(chr, range(0x905, 0x93A))) + "ािीुूेैोौ्",
    "".join(map(chr, range(0xE01, 0xE2F))),
)
_EMOJI_RANGES = ((0x1F300, 0x1F64F), (0x1F680, 0x1F6FF), (0x1F900, 0x1F9FF), (0x2600, 0x26FF))
_JOINED_EMOJI = (
    *("👨‍👩‍👧‍👦", "👩‍💻", "🧑‍🚀", "🏳️‍🌈", "🏴‍☠️", "❤️‍🔥", "👩🏽‍🔬", "🧑🏿‍🎓", "👨🏻‍🌾", "🐻‍❄️"),
    *("👁️‍🗨️", "🤷🏾‍♀️", "🙋🏼‍♂️", "❤️", "✌️", "☀️", "1️⃣", "#️⃣"),
)
_HANDS = "👋🤚✋👌🤞👍👎👊👏🙌🙏💪"
# The lengths that UTF-8 gives to code points: one to four bytes.
_CODE_POINT_RANGES = ((0x21, 0x7F), (0xA1, 0x800), (0x800, 0x10000), (0x10000, 0x110000))


def random_word(rng: random.Random) -> str:
    """Return a made-up lower-case word that one could pronounce."""
    letters = (rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(rng.randint(1, 4)))
    return "".join(letters) + rng.choice(("", "", "n", "r", "s", "t"))


def random_text(rng: random.Random, num_bytes: int) -> str:
    """Return text of at most `num_bytes` (at least 1) bytes of UTF-8.

    It is mostly as long as asked for, never empty, and has no blanks at its ends.
    """
    make = _repetitive if rng.random() < 0.1 else _mixed
    text = _cut(make(rng, num_bytes), num_bytes).strip()
    return text or rng.choice(_PRINTABLE)


def _mixed(rng: random.Random, num_bytes: int) -> str:
    """Return text of one kind, or that changes from kind to kind, a little too long perhaps."""
    pieces: list[str] = []
    missing = num_bytes
    while missing > 0:
        kind = rng.choices(_KINDS, _SHARES)[0]
        part_end = 0 if rng.random() < 0.7 else rng.randrange(missing)
        while missing > part_end:
            pieces.append(kind(rng))
            missing -= len(pieces[-1].encode())
    return "".join(pieces)


def _repetitive(rng: random.Random, num_bytes: int) -> str:
    """Return text with something in it several times in a row: laughter, bars, a refrain."""
    unit = _cut(_mixed(rng, 60), rng.randint(1, rng.choice((4, 12, 60))))
    times = rng.randint(2, 16 if len(unit) < 3 else 8)
    repeated = rng.choice(("", "", " ")).join([unit] * times)
    room = max(0, num_bytes - len(repeated.encode()))
    before = _mixed(rng, rng.choice((0, rng.randint(0, room))))
    after = _mixed(rng, rng.choice((0, rng.randint(0, room))))
    return before + repeated + after


def _cut(text: str, num_bytes: int) -> str:
    """Return the longest start of a text that is no longer than `num_bytes` of UTF-8."""
    return text.encode()[:num_bytes].decode(errors="ignore")


def _gap(rng: random.Random) -> str:
    """Return what stands between two words: mostly a blank."""
    chance = rng.random()
    if chance < 0.85:
        return " "
    return rng.choice((", ", ". ", "; ", ": ", " - ", "! ", "? ", "\n", "\t", "/", "_", " (", ") "))


def _cased(rng: random.Random, word: str) -> str:
    chance = rng.random()
    if chance < 0.8:
        return word
    return word.capitalize() if chance < 0.95 else word.upper()


def _common_word(rng: random.Random) -> str:
    return _cased(rng, rng.choice(COMMON_WORDS)) + _gap(rng)


def _made_up_word(rng: random.Random) -> str:
    if rng.random() < 0.1:
        return str(rng.randrange(10 ** rng.randint(1, 6))) + _gap(rng)
    return _cased(rng, random_word(rng)) + _gap(rng)


def _printable(rng: random.Random) -> str:
    return rng.choice(_PRINTABLE)


def _chinese(rng: random.Random) -> str:
    chance = rng.random()
    if chance < 0.08:
        return rng.choice(_CHINESE_PUNCTUATION)
    return rng.choice(_COMMON_CHINESE) if chance < 0.5 else chr(rng.randint(0x4E00, 0x9FA5))


def _hangul(rng: random.Random) -> str:
    return chr(rng.randint(0xAC00, 0xD7A3)) + rng.choice(("", "", " "))


def _accented_word(rng: random.Random) -> str:
    letters = list(random_word(rng))
    letters[rng.randrange(len(letters))] = rng.choice(_ACCENTED)
    return _cased(rng, "".join(letters)) + _gap(rng)


def _foreign_word(rng: random.Random) -> str:
    return "".join(rng.choices(rng.choice(_ALPHABETS), k=rng.randint(1, 9))) + _gap(rng)


def _emoji(rng: random.Random) -> str:
    chance = rng.random()
    if chance < 0.7:
        return chr(rng.randint(*rng.choice(_EMOJI_RANGES)))
    if chance < 0.8:
        return rng.choice(_JOINED_EMOJI)
    if chance < 0.9:  # a hand and its colour
        return rng.choice(_HANDS) + chr(rng.randint(0x1F3FB, 0x1F3FF))
    # a flag
    return chr(rng.randint(0x1F1E6, 0x1F1FF)) + chr(rng.randint(0x1F1E6, 0x1F1FF))


def _any_character(rng: random.Random) -> str:
    """Return any character that can be encoded, assigned or not, but no blanks."""
    while True:
        character = chr(rng.randrange(*rng.choice(_CODE_POINT_RANGES)))
        if not character.isspace() and not "\ud800" <= character <= "\udfff":
            return character


_KINDS = (
    _common_word,
    _made_up_word,
    _printable,
    _chinese,
    _hangul,
    _accented_word,
    _foreign_word,
    _emoji,
    _any_character,
)
_SHARES = (15, 20, 10, 18, 3, 7, 10, 12, 5)
