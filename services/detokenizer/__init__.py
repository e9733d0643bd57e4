"""The detokenizer, which decodes output tokens incrementally.

The text of a request is a pure function of its token ids, so any detokenizer can resume a request.
"""
