"""Layers with recurrent state: the gated delta rule."""
