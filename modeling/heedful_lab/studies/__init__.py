"""The paper's arguments as experiments: each study trains small models and reports its findings."""
