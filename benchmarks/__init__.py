"""Programs that measure, and that make the results and profiles that the project ships."""
