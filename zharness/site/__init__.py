"""Write a static site from the records of many runs: laws x engine releases, a page for each law and each finding."""
