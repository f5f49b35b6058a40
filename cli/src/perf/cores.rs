//! The cores of the two processes.

use crate::error::CliError;

/// The cores of the two processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cores {
    /// The core of the process that measures.
    pub initiator: usize,
    /// The core of the process that answers.
    pub responder: usize,
}

impl Cores {
    /// Chooses two cores of the mask: the requested ones, or else the first and the next one on
    /// another physical core.
    pub fn choose(
        asked: Option<[usize; 2]>,
        mask: &[usize],
        siblings: impl Fn(usize) -> Vec<usize>,
    ) -> Result<Self, CliError> {
        if mask.len() < 2 {
            return Err(CliError::Failed(format!(
                "perf needs two cores and this process may use {mask:?} only: two processes that spin on one \
                 core measure the scheduler; widen the mask (taskset, cpuset) or use a machine with two CPUs"
            )));
        }
        let [initiator, responder] = match asked {
            Some(cores) => cores,
            None => {
                let first = mask[0];
                let shared = siblings(first);
                let apart = mask.iter().skip(1).find(|core| !shared.contains(core));
                [first, *apart.unwrap_or(&mask[1])]
            }
        };
        if let Some(core) = [initiator, responder].into_iter().find(|core| !mask.contains(core)) {
            return Err(CliError::Usage(format!(
                "--cores: core {core} is not among those that this process may use: {mask:?}"
            )));
        }
        if initiator == responder {
            return Err(CliError::Usage(format!(
                "--cores: {initiator} is named twice; two spinning processes need a core each, such as {},{}",
                mask[0], mask[1]
            )));
        }
        Ok(Cores { initiator, responder })
    }

    /// Whether both are threads of one physical core, where a ping-pong never leaves the
    /// first-level cache.
    pub fn share_a_core(&self, siblings: impl Fn(usize) -> Vec<usize>) -> bool {
        siblings(self.initiator).contains(&self.responder)
    }
}

/// The logical CPUs of the same physical core; only `core` itself if the kernel does not tell.
pub fn siblings(core: usize) -> Vec<usize> {
    let path = format!("/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list");
    let listed = std::fs::read_to_string(path).ok().and_then(|list| parse_list(list.trim()));
    listed.unwrap_or_else(|| vec![core])
}

/// Parses the kernel's list format, such as `0,4-6`.
fn parse_list(list: &str) -> Option<Vec<usize>> {
    let mut cores = Vec::new();
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        cores.extend(first.parse::<usize>().ok()?..=last.parse::<usize>().ok()?);
    }
    Some(cores)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn alone(core: usize) -> Vec<usize> {
        vec![core]
    }

    #[test]
    fn the_default_avoids_the_sibling_of_the_first_core() {
        let pairs = |core: usize| vec![core & !1, core | 1];
        assert_eq!(Cores::choose(None, &[0, 1, 2, 3], pairs).unwrap(), Cores { initiator: 0, responder: 2 });
        let only_siblings = Cores::choose(None, &[0, 1], pairs).unwrap();
        assert_eq!(only_siblings, Cores { initiator: 0, responder: 1 });
        assert!(only_siblings.share_a_core(pairs));
        assert!(!only_siblings.share_a_core(alone));
    }

    #[test]
    fn wrong_cores_are_refused_with_the_reason() {
        let refused = |asked, mask: &[usize]| Cores::choose(asked, mask, alone).unwrap_err();
        let same = refused(Some([1, 1]), &[0, 1]);
        assert!(matches!(&same, CliError::Usage(why) if why.contains("1 is named twice")), "{same}");
        let outside = refused(Some([0, 9999]), &[0, 1]);
        assert!(matches!(&outside, CliError::Usage(why) if why.contains("core 9999 is not")), "{outside}");
        let single = refused(None, &[3]);
        assert!(matches!(&single, CliError::Failed(why) if why.contains("needs two cores")), "{single}");
    }

    #[test]
    fn the_kernels_lists_are_understood() {
        assert_eq!(parse_list("0"), Some(vec![0]));
        assert_eq!(parse_list("0,4-6"), Some(vec![0, 4, 5, 6]));
        assert_eq!(parse_list("0-"), None);
    }
}
