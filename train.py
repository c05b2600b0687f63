from dantinox.cli import entry

if __name__ == "__main__":
    entry("train")
