"""What this machine is and what it reaches, measured."""
