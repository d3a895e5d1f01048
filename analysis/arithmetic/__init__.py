"""Numbers that are argued with when training goes wrong, each computed by a function; no run is needed for them."""
