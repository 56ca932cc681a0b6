"""Opens, resumes and closes the folder of a run."""
