# Every target is one line that calls Python, Ansible or Fabric; variables such as NODES=2 reach it by the environment.
# Versions are pinned in pyproject.toml. `make` alone lists the targets.

PYTHON ?= python3
INVENTORY ?= inventory/hosts.yml
BIN := .venv/bin
need = @$(PYTHON) -m launch.bootstrap
# For what needs a GPU and installs nothing: as typed, else .venv's, else the machine's own.
installed := $(if $(findstring command line,$(origin PYTHON)),$(PYTHON),$(or $(wildcard $(BIN)/python),$(PYTHON)))

export INVENTORY
# Packages are installed without compiled files, which the first import writes; each later one would take twice as long.
unexport PYTHONDONTWRITEBYTECODE
# What was typed on the command line reaches the commands unchanged; make would expand each `$` in it.
$(foreach name,$(.VARIABLES),$(if $(findstring command line,$(origin $(name))),$(eval override export $(name) := $$(value $(name)))))
.DEFAULT_GOAL := help
.PHONY: help local horovod demo lab lab-down lab-status trust deploy data check train reproduce attach status logs stop gather report \
	tensorboard teardown \
	lock test test-all test-fast test-gpu test-torch lint drill bench-deploy bench-launch bench-check bench-checkpoint bench-train bench-gpu bench-forecast \
	bench-scale bench-hosts bench-stream bench-away bench-faults bench-links bench-data

# Installed, and pyproject.toml has not changed since: make sees that by itself, without starting Python.
.venv/.control .venv/.train .venv/.report: pyproject.toml
	@$(PYTHON) -m launch.bootstrap $(@:.venv/.%=%)

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

local: .venv/.train .venv/.report  ## train on this machine alone: no root, no inventory, no containers  [NPROC=2 ARGS="--epochs 3" PROJECT=dir]
	@$(BIN)/python -m launch.local

horovod: .venv/.train  ## build Horovod for --parallel horovod, and install it into .venv (a compiler; 2.5 minutes, once)
	@$(BIN)/python -m launch.horovod

demo:  ## the main job at once on a bare machine (root): lab of two hosts, trust, deploy, train NODES=2
	$(need) --root control
	@$(BIN)/fab demo

lab:  ## containers as hosts on this machine (root)  [HOSTS=3 LAB=lab LINK=1gbit CPUS=0.4 OS=debian,ubuntu UBUNTU_MIRROR=url]
	$(need) --root control
	@$(BIN)/fab lab

lab-down: .venv/.control  ## remove the lab: hosts, networks, volumes, inventory  [LAB=lab]
	@$(BIN)/fab lab-down

lab-status: .venv/.control  ## show the labs on this machine
	@$(BIN)/fab lab-status

trust: .venv/.control  ## show the hosts' key fingerprints, ask, write known_hosts  [INVENTORY=... YES=1]
	@$(BIN)/fab trust

deploy:  ## provision, detect, choose the network, build and distribute the image; safe to repeat  [INVENTORY=... HOROVOD=1 MEASURE=1]
	$(need) $(if $(HOROVOD),train) control
	@$(BIN)/fab deploy

data: .venv/.control  ## bring a folder to every host as /data of its ranks; alone: list what is there  [SRC=dir NAME=stl10 VERIFY=1 | NAME=stl10: use it again | NAME=stl10 REMOVE=1]
	@$(BIN)/fab data

check: .venv/.control  ## measure links, hosts and sameness, forecast a run; report.html  [NODES=2 ARGS="..." PROJECT=dir FORECAST=0 JSON=1]
	@$(BIN)/fab check

train: .venv/.control  ## run on the first NODES hosts  [NODES=2 ARGS="..." PROJECT=dir WORKLOAD=dir SCRIPT=main.py LAUNCHER=horovod RESUME=last MAX_RESTARTS=3 MIN_NODES=1 MAX_HOST_FAILURES=2 GRACE=30 WAIT=1 DETACH=1 SECRETS=file VIEW=plain KEEP_RUNS=20 SKIP_CHECK=1 DRY_RUN=1]
	@$(BIN)/fab train

reproduce: .venv/.control  ## run RUN once more: same image, hosts and arguments; say what differs, compare the results  [RUN=<id> ANYWAY=1 DRY_RUN=1 SECRETS=file WAIT=1 DETACH=1 VIEW=plain KEEP_RUNS=20 SKIP_CHECK=1]
	@$(BIN)/fab reproduce

attach: .venv/.control  ## watch a run that goes on on its hosts, whoever started it; Ctrl-C stops the run  [RUN=<id> VIEW=plain KEEP_RUNS=20]
	@$(BIN)/fab attach

status: .venv/.control  ## runs on the hosts, who waits for them, and the newest results
	@$(BIN)/fab status

logs: .venv/.control  ## output of a run from its begin, live while it runs; Ctrl-C leaves the view  [RUN=<id> VIEW=plain]
	@$(BIN)/fab logs

stop: .venv/.control  ## stop a run on all its hosts; ranks save first  [RUN=<id> GRACE=30]
	@$(BIN)/fab stop

gather: .venv/.control  ## fetch the results of runs that ended unseen; may be repeated  [RUN=<id> KEEP_RUNS=20]
	@$(BIN)/fab gather

report: .venv/.report  ## write the page of a run, runs/<id>/report.html; without RUN: of all runs, runs/report.html  [RUN=<id>]
	@$(BIN)/python -m launch.report

tensorboard: .venv/.train  ## show the curves of all runs, or of one, on this machine alone; Ctrl-C ends it  [RUN=<id>]
	@$(BIN)/python -m launch.tensorboard

teardown: .venv/.control  ## remove Muster's containers, images, runs and settings from the hosts  [YES=1: runs in progress and datasets, too; PACKAGES=1: packages, too]
	@$(BIN)/fab teardown

lock:  ## lock the training image's wheels with their hashes, after a change of pyproject.toml's group `train`
	$(need) lock
	@$(BIN)/python -m containers.lock

test:  ## every feature once: the lab (real containers, sshd, Ansible, Fabric), pages in Chromium, and the unit tests; 25 to 30 minutes on 2 cores
	$(need) train control test
	@$(BIN)/python -m tests.suite

test-all:  ## `make test` and the long matrix: all networks, systems and models, Horovod, random searches at full length; about an hour on 2 cores
	$(need) train control test
	@$(BIN)/python -m tests.suite all

test-fast:  ## the tests that need neither root, containers nor a browser, in a minute on 2 cores
	$(need) train control test
	@$(BIN)/python -m tests.suite fast

test-gpu:  ## what one GPU can show of the trainer, in 8 minutes: with the Python that has torch, installing nothing  [PYTHON=... ARGS="-k resume"]
	@MUSTER_TEST_DEVICE=$${MUSTER_TEST_DEVICE:-cuda} $(installed) -m pytest -c tests/gpu/pytest.ini $(ARGS) tests/gpu

test-torch:  ## the trainer's tests with another release of torch, in build/ (5 GB; 15 minutes)  [TORCH=2.11.0 PYTHON=python3.12 ARGS="-m 'not slow'"]
	@$(PYTHON) -m tests.other_torch

lint:  ## ruff, mypy, ansible-lint
	$(need) train control test lint
	@$(BIN)/ruff check && $(BIN)/ruff format --check && $(BIN)/mypy && PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/ansible-lint --offline -q

bench-deploy: .venv/.control  ## bytes and seconds of deploys to lab hosts, against `ansible -m ping`; deploys that are killed  [HOSTS=8 KILLED=20]
	@$(BIN)/python -m benchmarks.deploy

bench-data: .venv/.control  ## seconds of a dataset to lab hosts, then changed, then unchanged, against rsync to each in turn (root)  [HOSTS=3]
	@$(BIN)/python -m benchmarks.data

bench-launch: .venv/.control  ## from `make train` to the first optimizer step, against ssh and torchrun by hand
	@$(BIN)/python -m benchmarks.launch

bench-check: .venv/.control  ## seconds of make check on three lab hosts, whole and quick; what 64 and 256 simulated hosts cost  [ARGS="--parts many"]
	@$(BIN)/python -m benchmarks.check $(ARGS)

bench-checkpoint: .venv/.train  ## training time lost by a checkpoint against a blocking torch.save, with a core to spare and with none (5 minutes)
	@$(BIN)/python -m benchmarks.checkpoint $(ARGS)

bench-train: .venv/.train  ## images/s of the trainer on two processes, against a plain DDP script and without input (20 minutes)  [ARGS="--parts model pages blocks synthetic input jpeg"]
	@$(BIN)/python -m benchmarks.train $(ARGS)

bench-gpu:  ## images/s of ResNet-50 on one GPU, and what limits it; installs nothing (under 10 minutes)  [PYTHON=... ARGS=--cpu-smoke]
	@$(installed) -m benchmarks.gpu $(ARGS)

bench-forecast:  ## the forecast of a run against the run: three link speeds, two models, one to three lab hosts  [ARGS="--parts options"]
	$(need) --root control
	@$(BIN)/python -m benchmarks.forecast $(ARGS)

bench-links:  ## the options for slow links against plain DDP: speed on lab hosts, accuracy (hours; what is measured is kept)  [ARGS="--parts speed --links 1gbit --models resnet18 --options bf16,sync16 --nodes 2 --turns 3"]
	$(need) --root train control
	@$(BIN)/python -m benchmarks.links $(ARGS)

bench-faults:  ## seconds from a fault to the end of all ranks and the line that names it, on three lab hosts  [REPEATS=5]
	$(need) --root control
	@$(BIN)/python -m benchmarks.faults bench

drill:  ## one fault in a run on three lab hosts, with its figure, or many at random; alone: their list  [FAULT=kill REPEATS=1 | FAULTS=20 SEED=1]
	$(need) $(if $(FAULT)$(FAULTS),--root) $(if $(FAULTS),train) control
	@$(BIN)/python -m $(if $(FAULTS),benchmarks.drill,benchmarks.faults drill)

bench-stream:  ## 10,000 lines a second from each of two hosts for a minute: lost lines, lag of the view, cost of watching
	$(need) --root control
	@$(BIN)/python -m benchmarks.stream

bench-away:  ## a run without its control machine, then gathered by another one, on two lab hosts  [MINUTES=10]
	$(need) --root control
	@$(BIN)/python -m benchmarks.away

bench-scale:  ## start of a run on 32 hosts (an sshd each, containers stubbed); the plan for 10,000
	$(need) --root control
	@$(BIN)/python -m benchmarks.scale

bench-hosts:  ## deploy to many lab hosts on this machine and run on all of them: seconds, memory, disk, against one  [HOSTS=32]
	$(need) --root control
	@$(BIN)/python -m benchmarks.hosts
