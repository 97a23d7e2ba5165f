"""TierForce and its alternatives, with one interface."""
