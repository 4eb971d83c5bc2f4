#!/usr/bin/python3
"""NVIDIA's driver and container toolkit on this machine: what of them is to be installed, and whether they work then
(module_utils/muster_driver.py). It installs nothing: the role `engine` does (tasks/driver.yml).

stage=before fails where a driver is lacking and may not be installed, naming each reason and its fix, and returns
`lacking`, `system`, and `headers`, the package of the running kernel's headers where these are lacking. stage=after
loads the module, fails where that takes a reboot, and returns `restart`: services that find the toolkit as they start.
"""

from __future__ import annotations

from ansible.module_utils import muster_driver, muster_packages
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.muster_host import run
from ansible.module_utils.muster_ready import PACKAGES


def before(branch: int, probes: dict[str, list[dict[str, str]]], check_mode: bool) -> dict[str, object]:
    """Raises RuntimeError with words for the user."""
    seen = muster_driver.look()
    lacking = muster_driver.lacking(seen)
    needs_driver = muster_driver.DRIVER in lacking
    problems = muster_driver.obstacles(seen, branch) if lacking else []
    if needs_driver and not problems:
        problems = muster_driver.unknown(seen, probes.get(seen.system, []), refresh=not check_mode)
    if problems:
        what = f"NVIDIA's {' and '.join(lacking)} cannot be installed here"
        raise RuntimeError(f"{what}: {'; '.join(problems)}. Then make deploy again")
    if lacking and not check_mode:
        muster_packages.note_begin(PACKAGES)
    headers = [muster_driver.headers_package(seen)] if needs_driver and not seen.headers else []
    return {"lacking": lacking, "system": seen.system, "headers": headers}


def after(lacking: list[str]) -> dict[str, object]:
    """Raises RuntimeError with words for the user."""
    complaint = muster_driver.load() if muster_driver.DRIVER in lacking else ""
    if complaint:
        what = f"NVIDIA's driver is installed, and its module cannot be loaded yet: {complaint}"
        raise RuntimeError(f"{what}. Fix: reboot this host (Muster never does), then make deploy")
    docker = run(["docker", "ps", "--quiet"])
    restart = ["docker"] if muster_driver.TOOLKIT in lacking and docker.rc == 0 else []
    if restart and docker.out.strip():
        what = "Docker finds NVIDIA's container toolkit, which is installed now, when it starts, and it runs containers"
        raise RuntimeError(f"{what}. Fix: `systemctl restart docker` when they may end, then make deploy")
    return {"restart": restart}


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "stage": {"type": "str", "choices": ["before", "after"], "required": True},
            # For `before`: the driver's branch that would come.
            "branch": {"type": "int"},
            # For `before`, by system, as muster_driver.unknown takes them.
            "probes": {"type": "dict", "default": {}},
            # For `after`: what `before` has returned.
            "lacking": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    try:
        if module.params["stage"] == "before":
            module.exit_json(
                changed=False, **before(module.params["branch"], module.params["probes"], module.check_mode)
            )
        module.exit_json(changed=False, **after(module.params["lacking"]))
    except RuntimeError as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
