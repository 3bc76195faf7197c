"""Published graphs divided among devices, beside what is known of them and what others' balancers do."""
