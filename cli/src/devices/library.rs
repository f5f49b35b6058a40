//! Finds libibverbs without loading it.

use std::path::{Path, PathBuf};

/// The library's name.
pub const NAME: &str = "libibverbs.so.1";

/// The linker's list of libraries.
const CACHE: &str = "/etc/ld.so.cache";

/// The default folders of the dynamic linker; on Debian also their subfolder for the architecture.
const FOLDERS: [&str; 4] = ["/lib64", "/usr/lib64", "/lib", "/usr/lib"];

/// The file that the dynamic linker would load (`ld.so(8)`): from `LD_LIBRARY_PATH`, its list, or
/// its default folders.
pub fn find() -> Option<PathBuf> {
    let path = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let cache = std::fs::read(CACHE).unwrap_or_default();
    let kind = format!("{}-linux-gnu", std::env::consts::ARCH);
    let folders = FOLDERS.iter().flat_map(|folder| [Path::new(folder).join(&kind), folder.into()]);
    find_in(std::env::split_paths(&path), &cache, folders)
}

fn find_in(
    first: impl Iterator<Item = PathBuf>,
    cache: &[u8],
    last: impl Iterator<Item = PathBuf>,
) -> Option<PathBuf> {
    let in_folder = |folder: PathBuf| folder.join(NAME);
    let listed = listed(cache);
    first.map(in_folder).chain(listed).chain(last.map(in_folder)).find(|file| file.is_file())
}

/// The paths of the library in the linker's list of zero-terminated texts.
fn listed(cache: &[u8]) -> Vec<PathBuf> {
    let texts =
        cache.split(|byte| *byte == 0).filter_map(|text| std::str::from_utf8(text).ok()).map(Path::new);
    let ours = |path: &&Path| path.is_absolute() && path.file_name().is_some_and(|name| name == NAME);
    texts.filter(ours).map(Path::to_path_buf).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_found_in_the_linkers_order() {
        let folder = tempfile::tempdir().expect("folder");
        let at = |name: &str| folder.path().join(name);
        for name in ["a", "b", "c"] {
            std::fs::create_dir(at(name)).expect("folder");
        }
        let cache = format!("glibc-ld.so.cache1.1\0{NAME}\0{}\0libc.so.6\0", at("b").join(NAME).display());
        let found = || find_in([at("none"), at("a")].into_iter(), cache.as_bytes(), [at("c")].into_iter());
        assert_eq!(found(), None);
        for name in ["c", "b", "a"] {
            std::fs::write(at(name).join(NAME), "").expect("file");
            assert_eq!(found(), Some(at(name).join(NAME)), "before those that come later");
        }
    }

    #[test]
    fn a_list_that_is_none_lists_nothing() {
        for cache in [&b""[..], b"\0\0", &[0xff; 64], b"libibverbs.so.1\0", b"/lib/libibverbs.so.12\0"] {
            assert_eq!(listed(cache), Vec::<PathBuf>::new());
        }
        assert_eq!(listed(b"/lib/libibverbs.so.1"), [PathBuf::from("/lib/libibverbs.so.1")]);
    }
}
