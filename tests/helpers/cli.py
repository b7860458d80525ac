"""The command ``mxtensor`` inside of this process."""

from mxtensor.cli.main import main


def run(capsys, *arguments):
    """(exit code, standard output, standard error)."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    return code, out, err
