"""Quality of drafts: acceptance, overlap, needles."""
