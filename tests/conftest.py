"""Shared by all tests: no window is opened, whatever the machine has."""
import os

os.environ["MPLBACKEND"] = "Agg"
