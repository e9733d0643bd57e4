"""Bad words as token sequences that must not be generated."""

from tokenizers import Tokenizer

from penstock.services.tokenizer.errors import PromptError


def encode_bad_words(tokenizer: Tokenizer, words: list[str]) -> list[list[int]]:
    """Return the token sequences of some words. Raises PromptError.

    As in vLLM a word is encoded twice, as at the start of a text and following a space. The second
    sequence is left out where it ends with the first, which then forbids both.
    """
    stripped = [word.lstrip(" ") or word for word in words]
    texts = [text for word in stripped for text in (word, f" {word}")]
    encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    sequences = []
    for number, word in enumerate(words):
        plain, spaced = (list(text.ids) for text in encoded[2 * number : 2 * number + 2])
        if not plain:
            raise PromptError(
                "bad_words",
                f"bad_words[{number}]: got {word!r}, expected a string that has a token",
            )
        sequences.append(plain)
        if spaced[-len(plain) :] != plain:
            sequences.append(spaced)
    return sequences
