//! A C program that prints the layout of this machine's header, as its compiler sees it. It has
//! enumerations without a name, which rdma-sys leaves out, and unions, which rdma-sys writes by
//! hand.

use crate::abi_check::scan::Function;
use crate::abi_check::table::{Constant, Layout, Place, Size};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::process::Command;

const HEAD: &str = r#"#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <infiniband/verbs.h>
int main(void) {
    void *library = dlopen("libibverbs.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
"#;

/// What C says, by the names of the tables: for types size and alignment, for fields offset and
/// size, for values the value.
pub struct Witness(BTreeMap<String, (i64, i64)>);

impl Witness {
    /// Asks about everything in the tables, and whether the functions have the prototypes that we
    /// call them by.
    pub fn of(layouts: &[Layout], constants: &[Constant], functions: &[Function]) -> Self {
        let mut program = HEAD.to_owned();
        for layout in layouts {
            let c = layout.c_type;
            say(&mut program, layout.name, &format!("sizeof({c})"), &format!("_Alignof({c})"));
            for field in &layout.fields {
                let name = format!("{}.{}", layout.name, field.name);
                let (at, of) =
                    (format!("offsetof({c}, {})", field.name), format!("sizeof((({c} *)0)->{})", field.name));
                say(&mut program, &name, &at, &of);
            }
        }
        for constant in constants {
            say(&mut program, constant.name, constant.name, "0");
        }
        for function in functions {
            let symbol = &function.symbol;
            let same =
                format!("__builtin_types_compatible_p(__typeof__(({symbol})), {})", prototype(function));
            // The linker gives a program the default version of a symbol, of which libibverbs has
            // several.
            let version = format!("(void *)({symbol}) == dlsym(library, \"{symbol}\")");
            say(&mut program, symbol, &same, &version);
        }
        program.push_str("return 0; }\n");
        Witness(run(&program).lines().map(line).collect())
    }

    fn of_name(&self, name: &str) -> (i64, i64) {
        *self.0.get(name).unwrap_or_else(|| panic!("the C program says nothing of {name}"))
    }

    pub fn size(&self, name: &str) -> Size {
        let (bytes, align) = self.of_name(name);
        Size { bytes: bytes as usize, align: align as usize }
    }

    pub fn place(&self, name: &str) -> Place {
        let (offset, bytes) = self.of_name(name);
        Place { offset: offset as usize, bytes: bytes as usize }
    }

    pub fn value(&self, name: &str) -> i64 {
        self.of_name(name).0
    }

    /// Whether a function has the prototype that we call it by. Also whether its name leads to the
    /// version that a program is linked with.
    pub fn prototype_and_version(&self, symbol: &str) -> (bool, bool) {
        let (prototype, version) = self.of_name(symbol);
        (prototype == 1, version == 1)
    }
}

fn say(program: &mut String, name: &str, first: &str, second: &str) {
    writeln!(
        program,
        "printf(\"%s %lld %lld\\n\", \"{name}\", (long long)({first}), (long long)({second}));"
    )
    .expect("a String takes it");
}

fn line(line: &str) -> (String, (i64, i64)) {
    let mut words = line.split(' ');
    let mut word = || words.next().unwrap_or_else(|| panic!("the C program said {line:?}"));
    let name = word().to_owned();
    let mut number = || word().parse().expect("a number");
    (name, (number(), number()))
}

fn run(program: &str) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    let (source, built) = (folder.path().join("witness.c"), folder.path().join("witness"));
    std::fs::write(&source, program).expect("a file");
    output(
        Command::new("cc").args(["-std=gnu11", "-o"]).arg(&built).arg(&source).args(["-libverbs", "-ldl"]),
    );
    output(&mut Command::new(&built))
}

fn output(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?} can't be started: {error}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?} failed; is libibverbs-dev installed?\n{said}");
    String::from_utf8(output.stdout).expect("text")
}

/// Parts of prototypes where C has a type that ours only stands for: symbol, our type, the type in
/// C.
const STAND_INS: &[(&str, &str, &str)] = &[
    // The declared type is one that keeps programs from calling it without the header's inline
    // function.
    ("ibv_query_port", "*mut ibv_port_attr", "struct _compat_ibv_port_attr *"),
    ("ibv_get_device_guid", "u64", "__be64"),
    ("ibv_query_pkey", "*mut u16", "__be16 *"),
    ("ibv_wc_status_str", "u32", "enum ibv_wc_status"),
    ("ibv_event_type_str", "u32", "enum ibv_event_type"),
    ("ibv_is_fork_initialized", "u32", "enum ibv_fork_status"),
];

/// The type in C of a function that is as ours.
fn prototype(function: &Function) -> String {
    let c_type = |ours: &str| {
        let stand_in = STAND_INS.iter().find(|(symbol, name, _)| *symbol == function.symbol && *name == ours);
        stand_in.map_or_else(|| c_name(ours), |(_, _, c)| (*c).to_owned())
    };
    let takes: Vec<String> = function.takes.iter().map(|t| c_type(t)).collect();
    let takes = if takes.is_empty() { "void".to_owned() } else { takes.join(", ") };
    let returns = function.returns.as_deref().map_or_else(|| "void".to_owned(), c_type);
    format!("{returns} ({takes})")
}

fn c_name(ours: &str) -> String {
    if let Some(to) = ours.strip_prefix("*mut ") {
        return format!("{} *", c_name(to));
    }
    if let Some(to) = ours.strip_prefix("*const ") {
        return format!("const {} *", c_name(to));
    }
    match ours {
        "c_int" => "int".to_owned(),
        "c_char" => "char".to_owned(),
        "c_void" => "void".to_owned(),
        "u8" => "uint8_t".to_owned(),
        "u16" => "uint16_t".to_owned(),
        "u32" => "uint32_t".to_owned(),
        "u64" => "uint64_t".to_owned(),
        "usize" => "size_t".to_owned(),
        "isize" => "ssize_t".to_owned(),
        "ibv_gid" => "union ibv_gid".to_owned(),
        name if name.starts_with("ibv_") => format!("struct {name}"),
        other => panic!("which type in C is {other}?"),
    }
}
