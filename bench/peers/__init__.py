"""TierForce side by side with what users would otherwise run."""
