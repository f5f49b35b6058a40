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

/// Which of the two processes run on this host as this command: both, or one beside that of
/// another command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Here {
    Both,
    Initiator,
    Responder,
}

impl Cores {
    /// Chooses two cores of the mask: the requested ones, or else the first and the next one on
    /// another physical core. A core of a process that is not [`Here`] need not be in the mask.
    pub fn choose(
        here: Here,
        asked: Option<[usize; 2]>,
        mask: &[usize],
        siblings: impl Fn(usize) -> Vec<usize>,
    ) -> Result<Self, CliError> {
        if mask.len() < 2 && here == Here::Both {
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
                [first, *apart.or(mask.get(1)).unwrap_or(&first)]
            }
        };
        let used = match here {
            Here::Both => &[initiator, responder][..],
            Here::Initiator => &[initiator],
            Here::Responder => &[responder],
        };
        if let Some(core) = used.iter().find(|core| !mask.contains(core)) {
            return Err(CliError::Usage(format!(
                "--cores: core {core} is not among those that this process may use: {mask:?}"
            )));
        }
        if initiator == responder && (asked.is_some() || here == Here::Both) {
            return Err(CliError::Usage(format!(
                "--cores: {initiator} is named twice; two spinning processes need a core each, such as 0,1"
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
        let chosen = |mask: &[usize]| Cores::choose(Here::Both, None, mask, pairs).unwrap();
        assert_eq!(chosen(&[0, 1, 2, 3]), Cores { initiator: 0, responder: 2 });
        let only_siblings = chosen(&[0, 1]);
        assert_eq!(only_siblings, Cores { initiator: 0, responder: 1 });
        assert!(only_siblings.share_a_core(pairs));
        assert!(!only_siblings.share_a_core(alone));
    }

    #[test]
    fn wrong_cores_are_refused_with_the_reason() {
        let refused = |asked, mask: &[usize]| Cores::choose(Here::Both, asked, mask, alone).unwrap_err();
        let same = refused(Some([1, 1]), &[0, 1]);
        assert!(matches!(&same, CliError::Usage(why) if why.contains("1 is named twice")), "{same}");
        let outside = refused(Some([0, 9999]), &[0, 1]);
        assert!(matches!(&outside, CliError::Usage(why) if why.contains("core 9999 is not")), "{outside}");
        let single = refused(None, &[3]);
        assert!(matches!(&single, CliError::Failed(why) if why.contains("needs two cores")), "{single}");
    }

    #[test]
    fn the_core_of_a_process_on_another_host_need_not_be_there() {
        let chosen = |here, asked, mask: &[usize]| {
            Cores::choose(here, asked, mask, alone).map(|cores| [cores.initiator, cores.responder])
        };
        assert_eq!(chosen(Here::Initiator, Some([2, 70]), &[2]).unwrap(), [2, 70]);
        assert_eq!(chosen(Here::Responder, Some([2, 70]), &[70]).unwrap(), [2, 70]);
        assert!(chosen(Here::Initiator, Some([2, 70]), &[70]).is_err());
        for here in [Here::Initiator, Here::Responder] {
            assert_eq!(chosen(here, None, &[3]).unwrap(), [3, 3], "each has a host of its own");
            assert_eq!(chosen(here, None, &[3, 4]).unwrap(), [3, 4], "they may share one");
        }
    }

    #[test]
    fn the_kernels_lists_are_understood() {
        assert_eq!(parse_list("0"), Some(vec![0]));
        assert_eq!(parse_list("0,4-6"), Some(vec![0, 4, 5, 6]));
        assert_eq!(parse_list("0-"), None);
    }
}
