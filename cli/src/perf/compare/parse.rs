//! The figures in what the measured programs print.

use serde::Deserialize;

/// Bytes of the `MB` and `MiB` that UCX and perftest print.
const MIB: f64 = 1_048_576.0;

/// Our own report: the file that `--json` writes.
#[derive(Debug, Deserialize)]
pub struct OwnReport {
    results: Vec<OwnResult>,
    references: Vec<OwnReference>,
}

#[derive(Debug, Deserialize)]
struct OwnResult {
    p50_ns: Option<f64>,
    gb_s: Option<f64>,
}

/// A reference that ran in turns with ours.
#[derive(Debug, Deserialize, PartialEq)]
pub struct OwnReference {
    /// Such as `cache_line`.
    pub name: String,
    /// The median in nanoseconds.
    pub p50_ns: f64,
}

impl OwnReport {
    /// The report in this JSON text.
    pub fn read(json: &str) -> Result<Self, String> {
        serde_json::from_str(json).map_err(|error| format!("the report is not one of perf: {error}"))
    }

    /// The median latency of its only size, in nanoseconds.
    pub fn latency_ns(&self) -> Result<f64, String> {
        self.figure(|result| result.p50_ns, "p50_ns")
    }

    /// The bandwidth of its only size, in 10^9 bytes a second.
    pub fn gb_s(&self) -> Result<f64, String> {
        self.figure(|result| result.gb_s, "gb_s")
    }

    fn figure(&self, of: impl Fn(&OwnResult) -> Option<f64>, name: &str) -> Result<f64, String> {
        let value = self.results.first().and_then(of);
        positive(value.ok_or_else(|| format!("the report has no result with {name}"))?)
    }

    /// The references beside it.
    pub fn references(&self) -> &[OwnReference] {
        &self.references
    }
}

/// A figure of 0 or less, or none, is a fault of the program that printed it.
fn positive(value: f64) -> Result<f64, String> {
    let is_valid = value.is_finite() && value > 0.0;
    if is_valid { Ok(value) } else { Err(format!("a figure of {value} makes no sense")) }
}

fn number(field: Option<&&str>, what: &str) -> Result<f64, String> {
    let field = field.ok_or_else(|| format!("it has no column for the {what}"))?;
    positive(field.parse().map_err(|_| format!("{field:?} is no number for the {what}"))?)
}

/// The columns of the line `Final:` of `ucx_perftest`: iterations; latency typical, average,
/// overall; bandwidth average, overall; messages average, overall.
fn ucx_columns(printed: &str) -> Result<Vec<&str>, String> {
    let line = printed.lines().find_map(|line| line.trim_start().strip_prefix("Final:"));
    Ok(line.ok_or("no line begins with Final:")?.split_whitespace().collect())
}

/// The typical latency of `ucx_perftest -t tag_lat`, one way, in nanoseconds.
pub fn ucx_latency_ns(printed: &str) -> Result<f64, String> {
    Ok(number(ucx_columns(printed)?.get(1), "typical latency")? * 1e3)
}

/// The bandwidth of `ucx_perftest -t tag_bw` in 10^9 bytes a second.
pub fn ucx_gb_s(printed: &str) -> Result<f64, String> {
    Ok(number(ucx_columns(printed)?.get(5), "overall bandwidth")? * MIB / 1e9)
}

/// The row below the head `#bytes` of a program of perftest.
fn perftest_columns(printed: &str) -> Result<Vec<&str>, String> {
    let mut lines = printed.lines().skip_while(|line| !line.trim_start().starts_with("#bytes"));
    let row = lines.nth(1).ok_or("no row follows a head that begins with #bytes")?;
    Ok(row.split_whitespace().collect())
}

/// The typical latency of `ib_write_lat` in nanoseconds.
pub fn perftest_latency_ns(printed: &str) -> Result<f64, String> {
    Ok(number(perftest_columns(printed)?.get(4), "typical latency")? * 1e3)
}

/// The average bandwidth of `ib_write_bw` in 10^9 bytes a second.
pub fn perftest_gb_s(printed: &str) -> Result<f64, String> {
    Ok(number(perftest_columns(printed)?.get(3), "average bandwidth")? * MIB / 1e9)
}

/// The mean latency of the inter-process service in iceoryx2's `benchmark-publish-subscribe`, in
/// nanoseconds.
pub fn iceoryx2_latency_ns(printed: &str) -> Result<f64, String> {
    let line = printed.lines().find(|line| line.contains("ipc::Service :::"));
    let line = line.ok_or("no line is about ipc::Service")?;
    let (_, rest) = line.split_once("Latency:").ok_or("the line of ipc::Service has no Latency:")?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    match fields.get(1).map(|unit| unit.trim_end_matches(',')) {
        Some("ns") => number(fields.first(), "latency"),
        other => Err(format!("the latency is in {other:?} instead of ns")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lines with figures that UCX 1.22 printed.
    const UCX_LAT: &str = "\
|    Stage     | # iterations | 50.0%ile | average | overall |  average |  overall |  average  |  overall  |
+--------------+--------------+----------+---------+---------+----------+----------+-----------+-----------+
Final:                 20000      1.758    16.620    16.620      235.03     235.03       60168       60168
";
    const UCX_BW: &str =
        "Final:        20000      1.612    13.295    13.295      293.81     293.81       75215       75215\n";
    const UCX_REFUSED: &str = "\
[1795413739.740008] [vm:27314:0]  perftest.c:438  UCX  ERROR client failed. connect() failed: refused
[1795413739.740043] [vm:27314:0]  perftest.c:902  UCX  ERROR failed to setup RTE transport: I/O error
";

    /// The lines with figures that perftest 4.5 printed, without its last columns.
    const IB_LAT: &str = "\
                    RDMA_Write Latency Test
 Dual-port       : OFF          Device         : rxe0
---------------------------------------------------------------------------------------
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]
 2       1000          11.20          93.60        11.81              12.40          2.10
---------------------------------------------------------------------------------------
";
    const IB_BW: &str = "\
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 65536      1000             90.13              84.40              0.001350
";

    /// Printed by iceoryx2 0.9.
    const ICEORYX2: &str = "\
iceoryx2::service::ipc::Service ::: Iterations: 20000, Time: 0.10102544 s, Latency: 2525 ns, Sample Size: 8
iceoryx2::service::ipc_threadsafe::Service ::: Iterations: 20000, Time: 0.13503 s, Latency: 3375 ns, Sample
";

    #[test]
    fn recorded_outputs_have_their_figures() {
        assert_eq!(ucx_latency_ns(UCX_LAT), Ok(1758.0));
        assert_eq!(ucx_gb_s(UCX_BW).map(|gb_s| (gb_s * 1e4).round()), Ok(3081.0));
        assert_eq!(perftest_latency_ns(IB_LAT), Ok(11_810.0));
        assert_eq!(perftest_gb_s(IB_BW).map(|gb_s| (gb_s * 1e4).round()), Ok(885.0));
        assert_eq!(iceoryx2_latency_ns(ICEORYX2), Ok(2525.0));
    }

    #[test]
    fn malformed_outputs_are_refused_with_the_reason() {
        type Parser = fn(&str) -> Result<f64, String>;
        let cases: &[(Parser, &str, &str)] = &[
            (ucx_latency_ns, UCX_REFUSED, "Final:"),
            (ucx_latency_ns, "", "Final:"),
            (ucx_latency_ns, "Final: 20000", "no column for the typical latency"),
            (ucx_latency_ns, "Final: 20000 nan 1 1 1 1 1 1", "NaN makes no sense"),
            (ucx_latency_ns, "Final: 20000 0.000 1 1 1 1 1 1", "a figure of 0 makes no sense"),
            (ucx_latency_ns, "Final: 20000 -- 1 1 1 1 1 1", "\"--\" is no number"),
            (ucx_gb_s, "Final: 20000 1 1 1 1", "no column for the overall bandwidth"),
            (perftest_latency_ns, "Couldn't connect to localhost:18515", "#bytes"),
            (perftest_latency_ns, " #bytes #iterations\n", "no row follows"),
            (perftest_latency_ns, " #bytes\n 2 1000 11.2 93.6\n", "no column for the typical latency"),
            (perftest_gb_s, " #bytes\n-----------\n", "no column for the average bandwidth"),
            (perftest_gb_s, " #bytes\n 65536 1000 90.1 inf\n", "inf makes no sense"),
            (iceoryx2_latency_ns, "Please use either '--bench-all' or", "no line is about ipc::Service"),
            (iceoryx2_latency_ns, "x::ipc::Service ::: Time: 1 s", "no Latency:"),
            (iceoryx2_latency_ns, "x::ipc::Service ::: Latency: 1 us, Sample", "instead of ns"),
            (iceoryx2_latency_ns, "x::ipc::Service ::: Latency: -1 ns, Sample", "makes no sense"),
        ];
        for (parse, printed, reason) in cases {
            let refusal = parse(printed).unwrap_err();
            assert!(refusal.contains(reason), "{printed:?}: {refusal}");
        }
    }

    #[test]
    fn our_own_reports_have_results_and_references() {
        let report = OwnReport::read(
            r#"{"test": "x", "results": [{"bytes": 8, "p50_ns": 130.0}],
                "references": [{"name": "cache_line", "bytes": 8, "p50_ns": 40.0, "ratio": 3.2}]}"#,
        );
        let report = report.unwrap();
        assert_eq!(report.latency_ns(), Ok(130.0));
        assert_eq!(report.references(), [OwnReference { name: "cache_line".into(), p50_ns: 40.0 }]);
        assert!(report.gb_s().unwrap_err().contains("no result with gb_s"));
        for wrong in ["", "{}", "[]", r#"{"results": 5, "references": []}"#] {
            assert!(OwnReport::read(wrong).unwrap_err().contains("not one of perf"), "{wrong}");
        }
        let empty = OwnReport::read(r#"{"results": [], "references": []}"#).unwrap();
        assert!(empty.latency_ns().is_err());
    }
}
