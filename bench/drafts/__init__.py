"""What proposals are worth: acceptance, overlap, needles."""
