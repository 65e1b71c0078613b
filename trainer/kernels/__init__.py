"""The arithmetic of the step: each piece one small function, each with a plain reference in the tests."""
