"""The non-linearities of the feed-forward part."""

ACTIVATIONS = ("gelu", "relu", "swiglu")
