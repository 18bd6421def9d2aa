# Short names for the scripts; each sets itself up.
.PHONY: check test format quickstart clean

check:
	./scripts/test.sh

test:
	./scripts/test.sh tests

format:
	./scripts/setup_venv.sh
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

quickstart:
	./scripts/quickstart.sh

clean:
	rm -rf .venv .venv.lock quickstart_out build *.egg-info
