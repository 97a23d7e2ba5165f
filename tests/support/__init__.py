"""What tests share: checkpoints, engines, links, references, laws, and running the command."""
