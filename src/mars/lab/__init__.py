"""The laboratory: train, race, tune, report. Imports the library through its public names only."""
