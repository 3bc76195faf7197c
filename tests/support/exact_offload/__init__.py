"""The exact programme for tiny graphs with tiers."""
