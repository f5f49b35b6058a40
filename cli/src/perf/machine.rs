//! Facts about the machine and the build, for the report.

use std::path::Path;
use std::process::Command;

/// Shown for a fact that the system does not tell.
const UNKNOWN: &str = "unknown";

/// The kernel's release.
pub fn kernel() -> String {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease");
    release.map_or_else(|_| UNKNOWN.into(), |release| release.trim().into())
}

/// The processor's model, from the text of `/proc/cpuinfo`.
pub fn cpu(cpuinfo: &str) -> String {
    let line = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    line.map_or_else(|| format!("{UNKNOWN} {}", std::env::consts::ARCH), |(_, model)| model.trim().into())
}

/// The commit of the program: `TENSORWIRE_BUILD_COMMIT` at build time, else the commit of the
/// checkout that it was built in, if the checkout still exists.
pub fn commit() -> String {
    option_env!("TENSORWIRE_BUILD_COMMIT")
        .map(str::to_owned)
        .or_else(checked_out)
        .unwrap_or_else(|| UNKNOWN.into())
}

fn checked_out() -> Option<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent()?;
    // Without its own .git, git would answer for whatever checkout this folder happens to lie in.
    if !root.join(".git").exists() {
        return None;
    }
    let git = Command::new("git")
        .arg("-C")
        .arg(root)
        .args(["describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"])
        .output()
        .ok()?;
    let commit = String::from_utf8(git.stdout).ok()?.trim().to_owned();
    (git.status.success() && !commit.is_empty()).then_some(commit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_model_is_found_and_its_absence_is_said() {
        assert_eq!(cpu("processor : 0\nmodel name\t: Some CPU @ 3 GHz\n"), "Some CPU @ 3 GHz");
        assert!(cpu("").starts_with(UNKNOWN));
    }
}
