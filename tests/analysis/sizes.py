"""Campaigns of every size: what `conftest.write_campaign` is called with, by name."""

FIVE_SITES = ("weight", "reduced_gradient", "clipped_gradient", "moment_1", "moment_2")
SIZES = {
    "three sites": {},
    "one site, one bit, no envelope": {
        "faults": 6,
        "sites": ["weight"],
        "layers": 1,
        "bits": [30],
        "beta2s": [0.95],
        "clips": [None],
        "twins": 0,
    },
    "five sites, twelve layers": {"faults": 500, "sites": FIVE_SITES, "layers": 12, "beta2s": [0.9, 0.99, 0.999]},
    "few faults": {"faults": 20, "bits": [18, 27]},
    "faults that begin together": {"faults": 40, "starts": [50]},
}
