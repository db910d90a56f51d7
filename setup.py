"""Which folders make the package: those of modeling/, and configuration/, which it takes along as data."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages("modeling"), "heedful.configuration"],
    package_dir={"": "modeling", "heedful.configuration": "configuration"},
)
