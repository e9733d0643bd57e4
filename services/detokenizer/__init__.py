"""The detokenizer: token ids to text, as they come.

The text of a request is a pure function of its token ids, so any detokenizer can resume it.
"""
