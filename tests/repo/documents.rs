//! Documents and code agree: each document, section, file and test that one of them names is there.

use crate::source::{files, root};
use crate::text::RUST;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

const SPECIFICATION: &str = "docs/design/specification.md";
const SUMMARY: &str = "docs/SUMMARY.md";
const TESTING: &str = "docs/testing.md";
const SECURITY: &str = "docs/security.md";

/// Top-level folders whose files are named in text.
const FOLDERS: &[&str] =
    &["src/", "cli/", "tests/", "docs/", "examples/", "benches/", "fuzz/", "tuning/", "proto/"];

/// The file that a user's first program is in.
const USERS_OWN: &str = "src/main.rs";

fn text(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// The pages of the book and those beside it.
fn pages() -> Vec<(PathBuf, String)> {
    let beside = ["README.md", "CHANGELOG.md"].into_iter().filter(|page| root().join(page).is_file());
    files(&["docs"], "md").into_iter().chain(beside.map(|page| (PathBuf::from(page), text(page)))).collect()
}

/// Lines outside of code blocks.
fn prose(page: &str) -> impl Iterator<Item = &str> {
    let mut in_code = false;
    page.lines().filter(move |line| {
        let fence = line.trim_start().starts_with("```");
        in_code ^= fence;
        !in_code && !fence
    })
}

/// The links of a page, without those to other sites.
fn links(page: &str) -> Vec<String> {
    let targets = prose(page).flat_map(|line| line.split("](").skip(1));
    let targets = targets.filter_map(|rest| rest.split([')', ' ']).next());
    targets.filter(|target| !target.contains("://")).map(str::to_owned).collect()
}

/// The names by which links reach the headings of a page.
fn anchors(page: &str) -> BTreeSet<String> {
    let headings = prose(page).filter(|line| line.starts_with('#'));
    let anchor = |heading: &str| {
        let kept = |c: char| c.is_alphanumeric() || ['-', '_', ' '].contains(&c);
        let heading = heading.trim_start_matches('#').trim().to_lowercase();
        heading.chars().filter(|c| kept(*c)).map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    headings.map(anchor).collect()
}

/// `folder/../page` as it is without `..`.
fn plain(path: &Path) -> PathBuf {
    path.components().fold(PathBuf::new(), |mut plain, part| {
        match part {
            Component::ParentDir => drop(plain.pop()),
            Component::CurDir => {}
            part => plain.push(part),
        }
        plain
    })
}

#[test]
fn every_link_leads_to_a_file_and_a_heading() {
    let pages: BTreeMap<PathBuf, String> = pages().into_iter().collect();
    let mut broken = Vec::new();
    for (path, page) in &pages {
        for link in links(page) {
            let (file, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target = if file.is_empty() {
                path.clone()
            } else {
                plain(&path.parent().unwrap_or(Path::new("")).join(file))
            };
            let has_heading = || pages.get(&target).is_some_and(|page| anchors(page).contains(anchor));
            if !root().join(&target).exists() || (!anchor.is_empty() && !has_heading()) {
                broken.push(format!("{}: {link}", path.display()));
            }
        }
    }
    assert!(broken.is_empty(), "{} links lead nowhere:\n{}", broken.len(), broken.join("\n"));
}

#[test]
fn the_summary_has_every_page_once() {
    let mut listed = links(&text(SUMMARY));
    listed.sort();
    let pages = files(&["docs"], "md").into_iter().map(|(path, _)| path);
    let pages = pages.map(|path| path.strip_prefix("docs").expect("below").display().to_string());
    let pages: Vec<String> = pages.filter(|page| page != "SUMMARY.md").collect();
    assert_eq!(listed, pages, "pages of {SUMMARY} (left) and of docs/ (right)");
}

#[test]
fn every_section_of_the_specification_that_code_cites_is_there() {
    let specification = text(SPECIFICATION);
    let headings = prose(&specification).filter(|line| line.starts_with('#'));
    let sections: BTreeSet<&str> = headings
        .filter_map(|line| line.split(' ').nth(1))
        .map(|number| number.trim_end_matches('.'))
        .collect();
    let mut cited = 0;
    for (path, text) in files(RUST, "rs").into_iter().chain(files(&["proto"], "proto")) {
        for (at, line) in text.lines().enumerate() {
            for rest in
                line.split("specification ").skip(1).filter(|rest| rest.starts_with(|c: char| c.is_numeric()))
            {
                let number =
                    rest.split(|c: char| !c.is_alphanumeric() && c != '.').next().unwrap_or_default();
                let number = number.trim_end_matches('.');
                cited += 1;
                assert!(
                    sections.contains(number),
                    "{}:{}: there is no section {number}",
                    path.display(),
                    at + 1
                );
            }
        }
    }
    assert!(cited > 10, "the walk is broken");
}

/// The files that a line names, as far as they are written out.
fn named_files(line: &str) -> impl Iterator<Item = &str> {
    let words = line.split(|c: char| !(c.is_alphanumeric() || "./_-*".contains(c)));
    let words = words.filter(|word| FOLDERS.iter().any(|folder| word.starts_with(folder) && word != folder));
    words.map(|word| word.trim_end_matches(['.', '-'])).filter(|word| !word.contains('*'))
}

#[test]
fn every_file_that_a_page_or_a_comment_names_is_there() {
    let is_comment = |line: &&str| line.trim_start().starts_with("//");
    let comments = files(RUST, "rs").into_iter().map(|(path, text)| {
        (path, text.lines().filter(is_comment).map(|line| format!("{line}\n")).collect::<String>())
    });
    let pages = pages().into_iter().map(|(path, page)| {
        let prose: Vec<&str> = prose(&page).collect();
        (path, prose.join("\n"))
    });
    let mut broken = Vec::new();
    for (path, text) in comments.chain(pages) {
        let missing = text.lines().flat_map(named_files).filter(|file| !root().join(file).exists());
        let missing = missing.filter(|file| *file != USERS_OWN);
        broken.extend(missing.map(|file| format!("{}: {file}", path.display())));
    }
    assert!(broken.is_empty(), "{} files are not there:\n{}", broken.len(), broken.join("\n"));
}

/// Whether a file has a test of this name. A rule of the conformance suite is a test where it is
/// listed.
fn has_test(text: &str, name: &str) -> bool {
    let attributed = |at: usize| text[..at].trim_end().ends_with("#[test]");
    let plain = text.match_indices(&format!("fn {name}()")).any(|(at, _)| attributed(at));
    let listed = text.lines().any(|line| line.trim() == name);
    plain || listed && text.contains(&format!("pub fn {name}<"))
}

#[test]
fn every_known_fault_has_tests_that_are_there() {
    let page = text(TESTING);
    let rows = page.lines().skip_while(|line| !line.starts_with("| fault | tests |")).skip(2);
    let mut faults = 0;
    for row in rows.map_while(|row| row.strip_prefix("| ")) {
        let (fault, tests) = row.split_once(" | ").expect("two columns");
        let named: Vec<&str> = tests.split('`').skip(1).step_by(2).collect();
        assert!(
            !named.is_empty() && named.len().is_multiple_of(2),
            "{fault}: files and tests, one after the other"
        );
        for pair in named.chunks(2) {
            assert!(has_test(&text(pair[0]), pair[1]), "{fault}: {} has no test {}", pair[0], pair[1]);
        }
        faults += 1;
    }
    assert!(faults > 15, "the table of {TESTING} is not where it is read");
    assert!(!has_test("fn helper() {}", "helper") && has_test("#[test]\nfn real() {}", "real"));
}

/// Whether a function of this name is a test, also with arguments or with more attributes.
fn has_attributed(text: &str, name: &str) -> bool {
    text.match_indices(&format!("fn {name}(")).any(|(at, _)| {
        let before = text[..at].lines().rev().map(str::trim);
        let mut attributes =
            before.skip_while(|line| line.is_empty()).take_while(|line| line.starts_with("#["));
        attributes.any(|line| line == "#[test]")
    })
}

/// The tests that a line of a page names.
fn named_tests(line: &str) -> impl Iterator<Item = &str> {
    let is_name = |span: &&str| {
        let is_word = span.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
        is_word && span.matches('_').count() > 3
    };
    line.split('`').skip(1).step_by(2).filter(is_name)
}

/// Whether the last cell of a row leads to a test: by its name, by a file of tests, by another
/// table, or by the row before.
fn shows_tests(row: &str) -> bool {
    let leads = ["the same", "](#", ".rs`"];
    let cell = row.rsplit('|').nth(1).unwrap_or_default();
    named_tests(cell).next().is_some() || leads.iter().any(|lead| cell.contains(lead))
}

#[test]
fn every_line_of_the_page_on_security_names_tests_that_are_there() {
    let page = text(SECURITY);
    let texts: Vec<String> = files(RUST, "rs").into_iter().map(|(_, text)| text).collect();
    let is_test = |name: &str| {
        let mut naming = texts.iter().filter(|text| text.contains(name));
        naming.any(|text| has_test(text, name) || has_attributed(text, name))
    };
    let named: Vec<&str> = prose(&page).flat_map(named_tests).collect();
    let gone: Vec<_> = named.iter().filter(|name| !is_test(name)).collect();
    assert!(gone.is_empty(), "{SECURITY} names tests that are not there: {gone:?}");
    assert!(named.len() > 80, "{} tests are named", named.len());
    let mut has_column = false;
    for line in prose(&page) {
        has_column &= line.starts_with("| ") || line.starts_with("|---");
        has_column |= line.starts_with("| ") && (line.contains("| test |") || line.contains("| test in "));
        assert!(
            !has_column || line.starts_with("|---") || line.contains("| test") || shows_tests(line),
            "{line}"
        );
    }
    let page = "`a_b_c` is a setting, `a_test_with_a_name` and `src/x.rs` are none";
    assert_eq!(named_tests(page).collect::<Vec<_>>(), ["a_test_with_a_name"]);
    assert!(!is_test("a_test_with_another_name"));
    let shown = ["`src/x.rs`: `a_test_with_a_name`", "`tests/x.rs`", "[Links](#links)", "the same, twice"];
    let row = |cell: &str| format!("| does the same | [it](#it) fails | `src/x.rs` | {cell} |");
    assert!(shown.iter().all(|cell| shows_tests(&row(cell))));
    assert!(!["", "`src/x`", "a word"].iter().any(|cell| shows_tests(&row(cell))), "the last cell counts");
}

#[test]
fn links_anchors_and_named_files_are_found() {
    let page =
        "# A b, c\n[x](y.md#z) and [x](https://a.b)\n```\n# no heading\n[no](link.md)\n```\n## `Node::step`";
    assert_eq!(links(page), ["y.md#z"]);
    assert_eq!(anchors(page), BTreeSet::from(["a-b-c".to_owned(), "nodestep".to_owned()]));
    assert_eq!(plain(Path::new("docs/guide/../testing.md")), Path::new("docs/testing.md"));
    let named: Vec<&str> = named_files("see `src/x.rs`, tests/it. And src/*/y.rs").collect();
    assert_eq!(named, ["src/x.rs", "tests/it"]);
}
