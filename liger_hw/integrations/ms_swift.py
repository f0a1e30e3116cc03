"""A plugin file for ms-swift: its path is what `--external_plugins` takes, beside `--use_liger_kernel true`.

    swift sft --external_plugins $(python -m liger_hw.integrations.ms_swift) --use_liger_kernel true ...

Importing it installs the stand-in, in every process that ms-swift starts too.
"""

from liger_hw.integrations import install

install(children=True)

if __name__ == "__main__":
    print(__file__)
