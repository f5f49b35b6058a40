//! The examples of the README and of the guide, compiled and run as tests of the documentation.

macro_rules! documents {
    ($($name:ident: $path:literal;)+) => {
        $(
            #[doc = include_str!(concat!("../", $path))]
            pub struct $name;
        )+
    };
}

documents! {
    Readme: "README.md";
    FirstProgram: "docs/guide/first-program.md";
    StepsAndEdges: "docs/guide/steps-and-edges.md";
    Receiving: "docs/guide/receiving.md";
    Batches: "docs/guide/batches.md";
    StandingRequests: "docs/guide/standing-requests.md";
    BorrowedTensors: "docs/guide/borrowed-tensors.md";
    BufferRings: "docs/guide/buffer-rings.md";
    StringsAndVariants: "docs/guide/strings-and-variants.md";
    ForeignMemory: "docs/guide/foreign-memory.md";
    Validation: "docs/guide/validation.md";
    DeadTensorsAndAborts: "docs/guide/dead-tensors-and-aborts.md";
    Failures: "docs/guide/failures.md";
    Troubleshooting: "docs/guide/troubleshooting.md";
}
