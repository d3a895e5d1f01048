"""Plans into results on this machine: workers, one pack's job, who trains what, and how far it is."""
