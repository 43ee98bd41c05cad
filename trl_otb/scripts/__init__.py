"""What training scripts share: problems and their grading, arguments, stopping and resuming. See recipes/."""
