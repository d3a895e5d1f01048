"""What the package brings along: a clipper, an optimizer, and in `conf` the mitigations that switch them on."""
