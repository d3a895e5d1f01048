"""Where norms stand in the residual stream."""

PLACEMENTS = ("pre", "post", "deepnorm", "deepnorm_glm", "mix", "branchnorm", "sandwich", "none")
