"""TierForce compared with its alternatives."""
