"""Grows, trains, evaluates and resumes, with the folder that each run writes."""
