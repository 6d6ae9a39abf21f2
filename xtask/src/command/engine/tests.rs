use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;

use super::*;

const NO_CUDA: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/command/engine/no_cuda.py");

/// Loads the kernels of a mock of vLLM's packages, in which `import_kernels` runs `body`.
fn probed(name: &str, body: &str) -> Option<ExitStatus> {
    if crate::needs::find("python3").is_none() {
        // Not with a macro, whose output libtest would capture.
        let _ = std::io::Write::write_all(
            &mut std::io::stdout(),
            b"SKIPPED engine::tests: python3 is not installed\n",
        );
        return None;
    }
    let folder = std::env::temp_dir().join(format!("xtask-{name}-{}", std::process::id()));
    let platforms =
        format!("class current_platform:\n  @staticmethod\n  def import_kernels():\n    {body}\n");
    let illegal = "import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n";
    for (file, text) in [
        ("torch/__init__.py", "class ops:\n    class _C:\n        pass\n"),
        ("vllm/__init__.py", ""),
        ("vllm/platforms.py", &platforms),
        // As on a CPU that it was not built for.
        ("vllm/_C.py", illegal),
        ("vllm/_C_AVX2.py", "import torch\ntorch.ops._C.init_cpu_memory_env = 1\n"),
    ] {
        let path = folder.join(file);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    let mut probe = Command::new("python3");
    let output = probe.args([NO_CUDA, "probe"]).env("PYTHONPATH", &folder).output().unwrap();
    fs::remove_dir_all(folder).unwrap();
    Some(output.status)
}

#[test]
fn vllm_chooses_its_kernels_itself() {
    let Some(status) = probed("chooses", "import vllm._C_AVX2") else { return };
    assert!(status.success(), "{status}");
}

#[test]
fn kernels_that_do_not_load_are_noticed() {
    // vLLM only warns.
    let Some(status) = probed("warns", "print('cannot import')") else { return };
    assert_eq!(status.code(), Some(1));
    let Some(status) = probed("illegal", "import vllm._C") else { return };
    assert_eq!(status.signal(), Some(4));
}

#[test]
fn the_documented_commands_install_the_versions_of_the_tests() {
    let requirements = include_str!("requirements.txt");
    let page = include_str!("../../../../docs/start/vllm.md");
    let commands = page.split_once("    pip install uv\n").unwrap().1;
    let (commands, _) = commands.split_once("\n    python ").unwrap();
    let pins: Vec<&str> = commands.split_whitespace().filter(|word| word.contains("==")).collect();
    assert_eq!(pins.len(), 2, "{commands}");
    for pin in pins {
        assert!(requirements.lines().any(|line| line == pin), "{pin}");
    }
    assert!(include_str!("../../../../docs/start/serve.md").contains(commands), "{commands}");
}
