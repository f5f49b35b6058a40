//! Line charts as SVG text, on two logarithmic axes.

use std::fmt::Write;

/// Width and height of the whole picture, for one chart.
const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 360.0;
/// Space around the plot: left, right (for the legend), top, bottom.
const MARGINS: [f64; 4] = [70.0, 210.0, 40.0, 45.0];
/// Colours of curves, in order. Those of one name are equal.
const COLOURS: [&str; 16] = [
    "#1b5fa8", "#c8502b", "#5a8f29", "#8a4fa3", "#b08a00", "#17807e", "#7a5230", "#666666", "#d0609a",
    "#303030", "#4bb3e6", "#e8a33d", "#9bc53d", "#b8a0dc", "#8c1c2e", "#6fc7b2",
];
/// Height of a line of the legend.
const LEGEND_LINE: f64 = 17.0;

/// A plot with its legend.
#[derive(Clone, Debug, PartialEq)]
pub struct Chart {
    pub title: String,
    /// The unit of the vertical axis.
    pub unit: &'static str,
    pub curves: Vec<Curve>,
}

/// Points, and lines between those of neighbouring sizes. A size of the chart that the curve does
/// not have is a gap.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    /// The text of the legend.
    pub label: String,
    /// Curves of one colour have the same number.
    pub colour: usize,
    /// Lengths of dashes and gaps, as of the attribute `stroke-dasharray`. Empty: no gaps.
    pub dashes: &'static str,
    /// Bytes, and the figure in the unit of the chart.
    pub points: Vec<(f64, f64)>,
}

/// The charts below each other, with a line of text below them.
pub fn svg(charts: &[Chart], footer: &str) -> String {
    let height = charts.iter().map(height_of).sum::<f64>() + 30.0;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
         height=\"{height}\" font-family=\"sans-serif\" font-size=\"12\" role=\"img\">\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#ffffff\"/>\n"
    );
    let mut above = 0.0;
    for chart in charts {
        // Writing to a String does not fail.
        let _ = writeln!(text, "<g transform=\"translate(0 {above})\">");
        draw(chart, &mut text);
        text.push_str("</g>\n");
        above += height_of(chart);
    }
    label(&mut text, (MARGINS[0], height - 12.0), "start", footer);
    text + "</svg>\n"
}

/// The height of a chart, at least [`HEIGHT`], with room for its legend.
fn height_of(chart: &Chart) -> f64 {
    HEIGHT.max(MARGINS[2] + chart.curves.len() as f64 * LEGEND_LINE + MARGINS[3])
}

fn draw(chart: &Chart, text: &mut String) {
    let points = || chart.curves.iter().flat_map(|curve| &curve.points);
    let (Some(x), Some(y)) =
        (Axis::of(points().map(|point| point.0)), Axis::of(points().map(|point| point.1)))
    else {
        return label(text, (MARGINS[0], MARGINS[2]), "start", &format!("{}: no figures", chart.title));
    };
    let [left, right, top, bottom] = MARGINS;
    let (width, height) = (WIDTH - left - right, height_of(chart) - top - bottom);
    let across = |bytes: f64| left + x.share(bytes) * width;
    let down = |value: f64| top + (1.0 - y.share(value)) * height;
    label(text, (left, top - 16.0), "start", &format!("{} ({})", chart.title, chart.unit));
    let mut sizes: Vec<f64> = points().map(|point| point.0).collect();
    sizes.sort_by(f64::total_cmp);
    sizes.dedup();
    for &bytes in &sizes {
        grid(text, (across(bytes), top), (across(bytes), top + height));
        label(text, (across(bytes), top + height + 18.0), "middle", &size(bytes));
    }
    for value in y.ticks() {
        grid(text, (left, down(value)), (left + width, down(value)));
        label(text, (left - 8.0, down(value) + 4.0), "end", &value.to_string());
    }
    for (at, curve) in chart.curves.iter().enumerate() {
        for run in runs(&curve.points, &sizes) {
            let points: Vec<_> = run.iter().map(|&(bytes, value)| (across(bytes), down(value))).collect();
            draw_curve(text, curve, &points);
        }
        let (from, middle) = (WIDTH - right + 15.0, top + 6.0 + at as f64 * LEGEND_LINE);
        draw_curve(text, curve, &[(from, middle), (from + 24.0, middle)]);
        label(text, (from + 32.0, middle + 4.0), "start", &curve.label);
    }
}

/// The points in runs of neighbouring sizes. Both are in ascending order.
fn runs<'a>(points: &'a [(f64, f64)], sizes: &[f64]) -> impl Iterator<Item = &'a [(f64, f64)]> {
    let place = |point: &(f64, f64)| sizes.partition_point(|size| *size < point.0);
    points.chunk_by(move |point, next| place(next) == place(point) + 1)
}

fn draw_curve(text: &mut String, curve: &Curve, points: &[(f64, f64)]) {
    let colour = COLOURS[curve.colour % COLOURS.len()];
    let dashes = match curve.dashes {
        "" => String::new(),
        dashes => format!(" stroke-dasharray=\"{dashes}\""),
    };
    let path: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let _ = writeln!(
        text,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.8\"{dashes}/>",
        path.join(" ")
    );
    for (x, y) in points {
        let _ = writeln!(text, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"2.6\" fill=\"{colour}\"/>");
    }
}

fn grid(text: &mut String, from: (f64, f64), to: (f64, f64)) {
    let _ = writeln!(
        text,
        "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"#dddddd\"/>",
        from.0, from.1, to.0, to.1
    );
}

fn label(text: &mut String, at: (f64, f64), anchor: &str, label: &str) {
    let label = label.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let _ = writeln!(
        text,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\" fill=\"#222222\">{label}</text>",
        at.0, at.1
    );
}

/// Bytes in the largest binary unit that divides them.
fn size(bytes: f64) -> String {
    let units = [(1u64 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B")];
    let bytes = bytes as u64;
    let unit = units.into_iter().find(|(unit, _)| bytes >= *unit && bytes.is_multiple_of(*unit));
    unit.map_or_else(|| bytes.to_string(), |(unit, name)| format!("{} {name}", bytes / unit))
}

/// A logarithmic axis.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Axis {
    low: f64,
    high: f64,
}

impl Axis {
    /// An axis that has all positive values; `None` without one.
    fn of(values: impl Iterator<Item = f64>) -> Option<Self> {
        let values: Vec<f64> = values.filter(|value| value.is_finite() && *value > 0.0).collect();
        let low = values.iter().copied().reduce(f64::min)?;
        let high = values.iter().copied().reduce(f64::max)?;
        Some(Axis { low: low * 0.8, high: high * 1.25 })
    }

    /// Where the value lies, from 0 to 1.
    fn share(&self, value: f64) -> f64 {
        (value / self.low).ln() / (self.high / self.low).ln()
    }

    /// 1, 2 and 5 times the powers of ten on the axis; only the powers on a long one.
    fn ticks(&self) -> Vec<f64> {
        let factors: &[f64] = if self.high / self.low > 1000.0 { &[1.0] } else { &[1.0, 2.0, 5.0] };
        let decades = self.low.log10().floor() as i32..=self.high.log10().ceil() as i32;
        let ticks = decades.flat_map(|decade| {
            // Decimal text has no digits of rounding, as 10^-1 times 2 has.
            factors.iter().filter_map(move |factor| format!("{factor}e{decade}").parse().ok())
        });
        ticks.filter(|tick| (self.low..=self.high).contains(tick)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn chart() -> Chart {
        let curve = |label: &str, colour, dashes, points: &[(f64, f64)]| Curve {
            label: label.into(),
            colour,
            dashes,
            points: points.to_vec(),
        };
        Chart {
            title: "latency <one way> & more".into(),
            unit: "us",
            curves: vec![
                curve("tensorwire", 0, "", &[(8.0, 0.13), (4096.0, 0.38), (1_048_576.0, 23.0)]),
                curve("ucx, far", 1, "5 4", &[(8.0, 0.3)]),
            ],
        }
    }

    /// Checks that every element is closed in order. Returns the names of all elements.
    fn elements(xml: &str) -> Vec<String> {
        let (mut open, mut all) = (Vec::new(), Vec::new());
        for part in xml.split('<').skip(1) {
            let (tag, rest) = part.split_once('>').expect("a tag ends");
            assert!(!rest.contains('>'), "a bare > in {rest:?}");
            assert!(tag.matches('"').count().is_multiple_of(2), "an attribute does not end: {tag}");
            let name: String = tag.chars().take_while(|c| c.is_ascii_alphabetic() || *c == '/').collect();
            match name.strip_prefix('/') {
                Some(name) => assert_eq!(open.pop().as_deref(), Some(name)),
                None if tag.ends_with('/') => all.push(name.trim_end_matches('/').to_owned()),
                None => {
                    open.push(name.clone());
                    all.push(name);
                }
            }
        }
        assert!(open.is_empty(), "not closed: {open:?}");
        all
    }

    #[test]
    fn a_picture_is_well_formed_and_has_every_curve_point_and_label() {
        let text = svg(&[chart(), chart()], "commit 1 & 2");
        let elements = elements(&text);
        let count = |name: &str| elements.iter().filter(|element| *element == name).count();
        assert_eq!((count("svg"), count("g")), (1, 2));
        assert_eq!((count("polyline"), count("circle")), (2 * 4, 2 * (4 + 4)), "a curve and its legend each");
        assert!(
            text.contains("latency &lt;one way&gt; &amp; more (us)") && text.contains("commit 1 &amp; 2")
        );
        assert_eq!(text.matches("stroke-dasharray").count(), 4);
        for label in ["8 B", "4 KiB", "1 MiB", "tensorwire", "ucx, far", "0.2<", "10<"] {
            assert!(text.contains(label), "no {label} in {text}");
        }
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
    }

    #[test]
    fn no_line_goes_over_a_size_that_a_curve_does_not_have() {
        let points = [(8.0, 0.1), (64.0, 0.1), (1024.0, 0.2), (4096.0, 0.4)];
        let lengths = |sizes: &[f64]| runs(&points, sizes).map(<[_]>::len).collect::<Vec<_>>();
        assert_eq!(lengths(&[8.0, 64.0, 1024.0, 4096.0]), [4]);
        assert_eq!(lengths(&[8.0, 64.0, 256.0, 1024.0, 4096.0]), [2, 2]);
        assert_eq!(lengths(&[8.0, 16.0, 64.0, 256.0, 512.0, 1024.0, 4096.0, 8192.0]), [1, 1, 2]);
        let mut chart = chart();
        chart.curves[0].points.remove(1);
        chart.curves[1].points.push((4096.0, 1.9));
        let lines = svg(&[chart], "").matches("<polyline").count();
        assert_eq!(lines, 2 + 1 + 2, "two parts, a whole one, and two in the legend");
    }

    #[test]
    fn a_long_legend_makes_its_chart_higher_and_no_two_names_look_alike() {
        let mut long = chart();
        let first = long.curves[0].clone();
        long.curves = (0..COLOURS.len()).map(|colour| Curve { colour, ..first.clone() }).collect();
        long.curves.extend_from_within(..);
        let text = svg(&[long.clone(), chart()], "");
        let legend = MARGINS[2] + 6.0 + (long.curves.len() - 1) as f64 * LEGEND_LINE;
        assert!(legend < height_of(&long) && text.contains(&format!("translate(0 {})", height_of(&long))));
        let strokes: Vec<_> = COLOURS.iter().map(|colour| text.matches(colour).count()).collect();
        assert!(strokes.iter().all(|&count| count > 0), "{strokes:?}");
        assert_eq!(BTreeSet::from(COLOURS).len(), COLOURS.len());
        assert_eq!(height_of(&chart()), HEIGHT);
    }

    #[test]
    fn a_chart_without_figures_says_so() {
        let empty = Chart { title: "bandwidth".into(), unit: "GB/s", curves: Vec::new() };
        let text = svg(&[empty], "");
        elements(&text);
        assert!(text.contains("bandwidth: no figures"));
        elements(&svg(&[], "nothing"));
    }

    #[test]
    fn points_lie_inside_the_plot_and_larger_figures_higher() {
        let axis = Axis::of([8.0, 4096.0, 1e6].into_iter()).unwrap();
        let shares = [8.0, 4096.0, 1e6].map(|value| axis.share(value));
        assert!(0.0 < shares[0] && shares[0] < shares[1] && shares[1] < shares[2] && shares[2] < 1.0);
        assert_eq!(Axis::of([0.0, f64::NAN].into_iter()), None);
        let single = Axis::of([5.0].into_iter()).unwrap();
        assert!((0.0..=1.0).contains(&single.share(5.0)));
        assert_eq!(Axis { low: 0.08, high: 3.0 }.ticks(), [0.1, 0.2, 0.5, 1.0, 2.0]);
        assert_eq!(Axis { low: 0.08, high: 300.0 }.ticks(), [0.1, 1.0, 10.0, 100.0]);
    }

    #[test]
    fn sizes_have_binary_units() {
        assert_eq!([8.0, 1024.0, 1536.0, 1_048_576.0].map(size), ["8 B", "1 KiB", "1536 B", "1 MiB"]);
    }
}
