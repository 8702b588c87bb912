"""What counts as one meaning: rules, and clusters of steps by them."""
