"""What one optimizer step costs, beside torch's own and other people's: `python -m mars.bench`."""
