"""Campaigns of faults against whole runs, one file each; scripts/campaign_faults.py is their command."""
