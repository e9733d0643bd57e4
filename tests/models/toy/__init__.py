"""A toy family with recurrent state, for tests of all that a state passes through."""
