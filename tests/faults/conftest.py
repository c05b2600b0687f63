from training.small import shared_programs as shared_programs  # a fixture
